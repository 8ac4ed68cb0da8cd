"""The machine a run is on: its memory, its chip, what a run may use of them; and what oomguard itself may."""
