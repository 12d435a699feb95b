"""The YAML tree; Hydra finds it as a package."""
