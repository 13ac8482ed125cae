"""Events, effects and decision records of the engine: frozen, tagged, encodable; no logic but the
codec."""
