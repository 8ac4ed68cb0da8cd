"""Measured rows, the sweeps that made them, and the fit that turns them into the shipped coefficients."""
