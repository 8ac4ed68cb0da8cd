"""A training step as a value, and the one door through which every way of naming one goes."""
