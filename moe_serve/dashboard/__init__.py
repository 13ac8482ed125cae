"""The page: heat of the experts, where they are, what moves, why, and why it is slow.

An admin client of the controller like the CLI: one connection to its port however many browsers
look on. Responsible for showing, and for passing on what an operator who has logged in asks for.
Must never decide, command by itself or keep anything another part needs: its death touches nothing.
Called by bootstrap, which runs `actor.DashboardActor`.
"""
