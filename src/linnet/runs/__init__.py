"""Run folders: settings, metrics, weights and checkpoints."""
