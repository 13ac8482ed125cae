"""One module a topic. A command reads its arguments, asks somebody else one thing, and prints."""
