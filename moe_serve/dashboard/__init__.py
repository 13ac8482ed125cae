"""The page: heat of the experts, where they are, what moves and why. Read-only.

An admin client of the controller like the CLI: one connection to its port however many browsers
look on. Responsible for showing. Must never decide, command or keep anything another part needs:
its death touches nothing. Called by bootstrap, which runs `actor.DashboardActor`.
"""
