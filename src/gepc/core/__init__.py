"""What everything else stands on: errors, files, options, memory."""
