"""``python -m oomguard``."""

from oomguard.cli.main import main

if __name__ == "__main__":
    main()
