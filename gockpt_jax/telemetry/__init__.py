"""What became of a save: reports, events, spans.

In the order of their imports:

    events       every name under which the library reports
    report       what the user is told of a save
    save_record  what is known of one under way, and the reports so far
"""
