"""From command-line overrides to one typed config. Knows Hydra and OmegaConf; never torch."""
