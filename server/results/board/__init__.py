"""The board: methods compared under the strict rules (docs/strict-rules.md), their records, statistics and pages."""
