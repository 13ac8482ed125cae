"""Composition root: service file -> settings -> Ray actors wired through the ports. The only place
that knows all of them, and one of the few that import Ray."""
