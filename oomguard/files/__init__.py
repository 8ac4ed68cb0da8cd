"""Files that a person names: read in one way, and written so that none is lost."""
