"""Several SuperLinks under one server: a coordinator in ``goldfinch run``, and a relay as a run of each SuperLink.

``coordinator.py`` accepts the relays' connections, ``grid.py`` is a Flower Grid over all SuperLinks, ``supervisor.py``
submits relays and submits them again. ``app.py`` is the relay's ServerApp and ``worker.py`` its work; both import
neither torch nor a method. ``frames.py`` is what the two sides send each other.
"""
