"""Figures and tables of the documents, from result files."""
