"""How a run goes: what it needs, how its ranks start and end, and what it leaves."""
