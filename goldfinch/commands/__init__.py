"""The commands of the goldfinch program."""
