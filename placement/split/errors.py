"""What the splitter says about input it cannot use.

Responsible for: one typed error that names the field, what is wrong and what to do. Must never be
raised for a bug of ours (that is an assertion). Raised by the Python faces of `placement.split`;
the router turns it into INVALID_ARGUMENT.
"""


class SplitError(ValueError):
    """Input that cannot be split.

    field: what is at fault. problem: what is wrong, with the limit. remedy: the next step.
    """

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(field, problem, remedy)
        self.field = field
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}; {self.remedy}"
