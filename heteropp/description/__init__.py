"""The files that a person writes or reads: cluster, chip, model, plan, profile, presets."""
