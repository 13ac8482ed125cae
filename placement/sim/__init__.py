"""Simulation: the production engine and roles on a virtual clock, with checkers over the event
log."""
