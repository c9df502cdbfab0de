"""Verbs that run on the host: from pins to a published image. Each module is one verb."""
