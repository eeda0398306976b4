"""The engine of studies: stages, resume, records, tuning, claims, report, board."""
