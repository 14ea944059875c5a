"""Plans: frozen nodes that check and print their parameters and do no work."""
