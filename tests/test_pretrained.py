"""The packaged chat model, as the default job loads it."""

import pytest
import torch
import transformers

from flathead.pretrained import load_model, load_tokenizer, new_model


def test_the_packaged_model_is_a_plain_fp32_model_and_loads_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    transformers.logging.disable_progress_bar()  # as the trainer does; the others obey it
    model = load_model(None)
    transformers.logging.enable_progress_bar()
    assert capfd.readouterr() == ("", "")  # no progress bar where the output is no terminal
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.vocab_size == 49152
    twin = new_model(model.config)
    twin.load_state_dict(model.state_dict())  # no buffers or names of a quantized model
    tokenizer = load_tokenizer(None)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
