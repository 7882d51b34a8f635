"""Comparisons of methods: the rules, the search, and the ranking."""
