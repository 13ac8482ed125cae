"""What the planner library says about arguments it cannot use.

Responsible for: one typed error that names the argument, the limit and the next step. Must never
be raised for a bug of ours (that is an assertion). Raised by `placement.eplb` and
`placement.adapters`.
"""

from __future__ import annotations


class EplbError(ValueError):
    """An argument that cannot be planned with.

    argument: its name. problem: what is wrong, with the limit. remedy: the next step.
    """

    def __init__(self, argument: str, problem: str, remedy: str) -> None:
        super().__init__(argument, problem, remedy)
        self.argument = argument
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.argument}: {self.problem}; {self.remedy}"
