"""What leaves the house: documents generated from data, registry, evidence."""
