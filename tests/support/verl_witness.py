"""Another of verl's external modules: writes down each call of token_stats by an engine, in whatever process."""

import os
from pathlib import Path
from typing import Any

from flathead.integrations import verl_engines

_token_stats = verl_engines.token_stats


def _written_down(*args: Any, **kwargs: Any) -> Any:
    with Path(os.environ["FLATHEAD_CALLS"]).open("a") as file:
        file.write(" ".join(kwargs["stats"]) + "\n")
    return _token_stats(*args, **kwargs)


verl_engines.token_stats = _written_down  # type: ignore[assignment]  # same call
