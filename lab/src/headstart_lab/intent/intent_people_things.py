"""Intents about people, media, shopping and money; the form is described in `intent_schema`."""

from headstart_lab.intent.intent_schema import Intent, intent

PEOPLE: tuple[Intent, ...] = (
    intent(
        "call_person",
        "to talk on the phone",
        "person:person:who",
        """(call|phone|ring) {person} (now|)
        (start|make) a (call|phone call) (to|with) {person}
        get {person} on the phone
        =I (want|need|have) to (talk|speak) (to|with) {person} on the phone
        =I (must|want to|need to) (call|phone|ring) {person}
        =(can|may) I (talk|speak) (to|with) {person}?
        =I have not (talked|spoken) (to|with) {person} for long, (call|phone|ring) now""",
        """put me on the phone with {person}
        =I would like to have a call with {person}
        =let me speak to {person} now
        =it is {person} I need to call""",
    ),
    intent(
        "send_message",
        "to write to somebody",
        "person:person:who; text:text:what to say",
        """(send|write) (a message|a text|a note) to {person}: {text}
        (send|write|text|message) {person}: {text}
        (tell|let) {person} know that {text}
        (tell|write to|text|message) {person} that {text}
        =I (want|need) to (tell|text|write to) {person} that {text}
        =(send|write) {person} a (message|text|note) (that says|saying) {text}
        =my message (to|for) {person} is: {text}""",
        """=a note for {person} that says {text}
        message {person} saying {text}
        =I want {person} to know that {text}
        =to {person}: write that {text}""",
    ),
    intent(
        "add_event",
        "something put in the calendar",
        "event:event:what; date:date:which day; time:time:start",
        """(add|put) (a|the) {event} (to|in) (my|the) calendar on {date} at {time}
        (plan|schedule|note) (a|the) {event} (on|for) {date} at {time}
        =I have (a|my) {event} on {date} at {time}, (add|put) it (to|in) (my|the) calendar
        =(there is|we have) a {event} on {date} at {time}, (note|schedule) it
        (plan|schedule) a {event} on {date}
        =my calendar (needs|should have) a {event} on {date} at {time}
        =(the|my) {event} is on {date} at {time}, put it in the calendar""",
        """put in my calendar that there is a {event} on {date} at {time}
        =schedule it: the {event} is on {date} at {time}
        =we have a {event} on {date}, add it to the calendar
        note that I have a {event} on {date} at {time}""",
    ),
    intent(
        "translate_word",
        "a word in another language",
        "word:topic:which word; language:language:into which",
        """(translate|put) {word} (to|into) {language}
        =(what is|how do I say|how do you say) {word} in {language}?
        =what (do|would) people call {word} in {language}?
        =I (need|want) the {language} word for {word}
        (give|tell|show) me the {language} word for {word}
        =how (is|would) {word} be (said|called|written) in {language}?
        =in {language}, what is {word}?""",
        """=in {language} how do people say {word}?
        say {word} in {language}
        =what is the {language} word for {word}?
        translate into {language} the word {word}""",
    ),
    intent(
        "get_news",
        "what happened lately",
        "topic:topic:about what",
        """(read|show|tell|get) me the (news|latest news|headlines) (about|on) {topic}
        =what (is new|is the news|happened lately) (about|with) {topic}?
        =(any|is there any) news (about|on) {topic}?
        =what do the (papers|headlines|reporters) say about {topic}?
        (look up|find) the (news|headlines) (about|on) {topic}
        =I want to (read|hear|know) the (news|latest news) (about|on) {topic}
        =what has happened with {topic} lately?""",
        """=about {topic} what is the latest news?
        find out what the papers say about {topic}
        =let me hear the headlines on {topic}
        =is there anything new in the news about {topic}?""",
    ),
)

THINGS: tuple[Intent, ...] = (
    intent(
        "play_song",
        "to hear music",
        "song:title:name of the music; artist:person:who sings",
        """play (the song|the track|) {song} (by|from) {artist}
        (put on|start) (the song|the track|) {song} (by|from) {artist}
        =I (want|would like) to (hear|listen to) {song} (by|from) {artist}
        let (me|us) (hear|listen to) {song} (by|from) {artist}
        play (the song|the track) {song}
        =(how about|can we hear|can I hear) {song} by {artist}?
        =I (love|like) {song} by {artist}, (play|put on) that song""",
        """=there is a song by {artist}, play {song}
        =the song I want to hear is {song} by {artist}
        =let the song be {song} from {artist}
        listen to the track {song}""",
    ),
    intent(
        "buy_ticket",
        "to see a film at the cinema",
        "film:title:name of the film; date:date:which day",
        """(buy|get|book|reserve) (me|us|) (a ticket|tickets|two tickets|seats) (for|to see) {film} on {date}
        (buy|book) (cinema|movie|film) tickets for {film} on {date}
        =(I|we) (want to|would like to|must) (see|watch) {film} (at the cinema|at the movies) on {date}
        =on {date} (I|we) want to (see|watch) (the film|the movie) {film}
        =(are there|is it too late for) (seats|tickets) for {film} on {date}?
        =(take|get) (me|us) to the (cinema|movies) to (see|watch) {film}
        =when does {film} (play|start) at the cinema on {date}? get (me|us) (a ticket|tickets)""",
        """=for {date} buy us seats at the cinema to see {film}
        =can we watch {film} at the movies on {date}?
        =the film I want to see on {date} is {film}, get a ticket
        =I need two tickets for the movie {film}""",
    ),
    intent(
        "add_item",
        "something put on the shopping list",
        "item:item:what to buy",
        """(add|put) {item} (to|on) (my|the|our) (shopping list|list|groceries list)
        (note|write) {item} (down|) (on|for) the (shopping|groceries|shopping list)
        =(we|I) (need to|must|have to) buy {item}
        =we (need|are out of|ran out of) {item} (at home|from the shop)
        =(there is no|no) (more|) {item} (left|at home), (add|put) it (to|on) the list
        remind me to (buy|get) {item}
        =the shopping list (needs|should have) {item}""",
        """=on the shopping list I need {item}
        =there is no {item} left, buy some more
        =we have to get {item} from the shop
        =our list should have {item}, write it down""",
    ),
    intent(
        "find_recipe",
        "how to cook something",
        "dish:item:what to cook with",
        """(find|show|give|get) me a recipe (with|for) {dish}
        =what can (I|we) (cook|make|bake) (with|from) {dish}?
        =how (do|can) (I|we) (cook|prepare|bake) {dish}?
        =I (want|would like) to (cook|bake|prepare) something with {dish}
        (look up|look for) (a recipe|recipes) (with|for) {dish}
        =I have {dish}, what can I (cook|bake|make)?
        (teach|tell) me (how to|to) (cook|prepare) {dish}""",
        """=which recipe is good for {dish}?
        =something to cook with {dish}, find a recipe
        =with {dish} what can we bake?
        show us how to prepare {dish}""",
    ),
    intent(
        "track_parcel",
        "where a delivery is",
        "number:number:number of the parcel",
        """(track|find|follow|locate) (my|the) (parcel|package|delivery|order) (number|) {number}
        =where is (my|the) (parcel|package|delivery|order) (number|) {number}?
        =when (will|does) (parcel|package|delivery|order) (number|) {number} (arrive|come)?
        =has (parcel|package|order|delivery) {number} (arrived|been delivered|come) yet?
        =(my|the) (parcel|package|order) {number} is late, (where is it|find it)
        (check|look up) (parcel|package|delivery|order) (number|) {number}""",
        """=I am looking for package {number}, where is it?
        =did my order {number} arrive yet?
        look up where parcel number {number} is
        =the delivery {number} has not come yet""",
    ),
    intent(
        "send_money",
        "to pay somebody",
        "amount:amount:how much; person:person:to whom",
        """(send|transfer|pay|wire) {amount} to {person}
        (send|pay|give|wire) {person} {amount}
        =I (owe|must pay|have to pay) {person} {amount}
        =I (want|need) to (transfer|send|wire|pay) {amount} to {person}
        =(let|make) {person} (have|get) {amount} from my account
        (make|start) a (transfer|payment) of {amount} to {person}
        =from my account (send|transfer|pay) {amount} to {person}""",
        """=to {person} transfer {amount}
        =it is {amount} that I owe {person}, pay now
        =the payment of {amount} is for {person}, send it
        =I have to give {person} {amount} from my account""",
    ),
    intent(
        "convert_money",
        "a sum in other money",
        "amount:amount:how much; currency:currency:into which money",
        """(convert|change|turn) {amount} (to|into) {currency}
        =(how much|what) is {amount} in {currency}?
        =how many {currency} (do I get for|are|is|make) {amount}?
        =what (do I get|would I get) for {amount} in {currency}?
        =I (have|want to change) {amount}, (what|how much) is (it|that) in {currency}?
        (tell|show) me (what|how much) {amount} is in {currency}""",
        """=in {currency} how much is {amount}?
        =how much do I get in {currency} for {amount}?
        =I want to turn {amount} into {currency}
        =for {amount} how many {currency} would I get?""",
    ),
    intent(
        "check_stock",
        "the price of a share",
        "company:company:which company",
        """=(what is|tell me|show me) the (share|stock) price of {company}
        =how (is|are) {company} (stock|shares) doing (today|now|)?
        =how much (is|does) (one|a) (share|stock) of {company} (cost|)?
        (check|look up|find) (the price of|) {company} (stock|shares)
        =(are|did) {company} (shares|stock) (up|go up|go down) today?
        =what does {company} stock cost (today|now|)?""",
        """=the {company} share, how much does it cost?
        =what is one share of {company} today?
        =did the price of {company} stock go up?
        show me how {company} shares are doing""",
    ),
)
