"""How far an output can move: exact at a point, bounded over a ball, shown by a witness."""
