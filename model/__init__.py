"""The byte-level GPT, its checkpoint policies, and the trainer: what of oomguard builds MLX models."""
