"""Results for people: matplotlib figures, and self-contained HTML pages made of plain sections."""
