"""How far attention moves when all positions are shifted; see docs/precision.md."""
