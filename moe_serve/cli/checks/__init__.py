"""What `moe-serve doctor` looks at on this machine. Each check is a row; none changes anything.

Responsible for facts and for the next step where a fact is bad. Must never print a token or a key:
a report is meant to be pasted. Called by the doctor command.
"""

from moe_serve.cli.checks.row import Check, Level

__all__ = ["Check", "Level"]
