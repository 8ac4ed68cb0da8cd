"""Settings as values, and as a person writes them: shapes, checkpoint policies, a step; presets."""
