"""Peaks and times from closed forms: counts over a shape, coefficients fitted to measured rows. No MLX."""
