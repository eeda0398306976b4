"""The methods themselves, one readable file or small folder per paper, by family."""
