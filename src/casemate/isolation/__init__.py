"""Boundaries: one package each, behind one small contract."""
