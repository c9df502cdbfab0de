"""Experiment files of AMD's Primus, which are recipes by another name."""
