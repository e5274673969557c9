"""One report for a run and for a study: results, notes, figures, pages."""
