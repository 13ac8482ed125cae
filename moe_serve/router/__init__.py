"""The router: gRPC edge, checks, split, dispatch, combine. Many may run; each knows all others'
addresses.

Responsible for carrying out `placement.roles.router` on sockets. Must never decide what is placed,
split or retried. Called by front ends over gRPC and by the controller through `ports.RouterPort`.
Import the modules.
"""
