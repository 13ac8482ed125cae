"""What people see, made from messages. Pure: no stream, no clock, no connection."""
