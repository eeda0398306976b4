"""What every room stands on: models, data, scoring, training, statistics, files, errors."""
