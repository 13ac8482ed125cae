"""The controller: drives the engine, journals, publishes, supervises parts, answers operators.

Responsible for carrying out what `placement.engine` decides, in the order it says. Must never
decide where an expert lies. Started by bootstrap as one actor.
"""
