"""Will this training step fit this machine, and if not, what is the cheapest change that makes it fit?"""

from __future__ import annotations
