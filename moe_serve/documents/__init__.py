"""What the controller tells, as documents for programs: one set for the page, the command line and
tests.

Responsible for turning messages of the admin API into JSON, for the arrays of a load window, and
for the schemas of these documents. Must never know HTTP, ask a controller, read a clock or judge
what is stale; what does not fit is a typed error of `moe_serve.errors`. Called by `dashboard` and
`cli`.
"""
