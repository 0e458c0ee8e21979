"""Token files: manifest, opening, sequences and mixtures, window order, verification."""
