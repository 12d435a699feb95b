"""Training engines: each builds, forwards, steps and saves a model; what happens at the head is `base`'s alone."""
