"""Request bodies as pydantic models, and the tables of what is supported, harmless and refused. No effects here."""
