"""The byte-level GPT, its checkpoint policies, and the trainer. The only part of oomguard that builds MLX models."""
