"""Results for people: matplotlib figures, and the self-contained HTML page of the demonstration."""
