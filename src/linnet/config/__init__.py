"""The settings of a run: schema, presets, fine-tuning."""
