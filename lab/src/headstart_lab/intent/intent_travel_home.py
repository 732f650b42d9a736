"""Intents about travel and the home; the form is described in `intent_schema`."""

from headstart_lab.intent.intent_schema import Intent, intent

TRAVEL: tuple[Intent, ...] = (
    intent(
        "book_flight",
        "a seat on a plane",
        "city:city:where to fly; date:date:day of departure",
        """(book|reserve|find|get) (me|) a (flight|plane ticket|seat on a plane) to {city} (on|for) {date}
        (book|find) a {city} flight
        fly me to {city} on {date}
        =I (need|want) to fly to {city} on {date}
        =on {date} I (must|want to|have to) (fly|take a plane) to {city}
        =(is there|are there) (a plane|flights) to {city} on {date}?
        =I am (flying|leaving) for {city} on {date}, (get|find) me a (flight|seat|plane ticket)
        =(I need|we need) a (flight|plane ticket) to {city}""",
        """=for {date} (get|reserve) me a seat to fly to {city}
        =I am looking for a (plane|flight) to {city} on {date}
        =I want to take a plane on {date} to {city}
        put me on a plane to {city}""",
    ),
    intent(
        "book_hotel",
        "a bed for the night",
        "city:city:where to stay; date:date:first night",
        """(book|reserve|find|get) (me|us|) a (hotel|hotel room|bed|place to sleep) in {city} (on|for) {date}
        (book|find) a {city} hotel
        =I (need|want) to (stay|sleep) in a hotel in {city} on {date}
        =on {date} (I|we) (must|want to|have to) (sleep|stay the night) in {city}
        =(is there|are there) (a free hotel|hotel rooms|hotels) in {city} on {date}?
        =(I need|we need|I am looking for) a (hotel|bed) in {city}
        =we are in {city} on {date}, (find|get) us a hotel""",
        """=for {date} (get|reserve) us a place to stay the night in {city}
        =we want to stay in {city} on {date}, reserve a hotel
        =where in {city} is there a hotel room for {date}?
        put us in a hotel in {city}""",
    ),
    intent(
        "order_taxi",
        "a car with a driver",
        "place:street:where to go; time:time:pick up",
        """(order|call|get|book) (me|us|) a (taxi|cab) to {place} (at|for) {time}
        (order|send|get) a (taxi|cab|car) at {time} to {place}
        =(I need|we need|I want) a (taxi|cab) to {place} at {time}
        =at {time} (I|we) (need|want) a (car|cab|taxi|ride) to {place}
        =can a (taxi|cab|driver) (take|drive|bring) (me|us) to {place} at {time}?
        drive me to {place}
        =(I need|get me) a ride to {place}""",
        """=for {time} (order|book) a driver to bring us to {place}
        =is there a (cab|taxi) to {place} at {time}?
        =I have to go to {place} at {time}, send a taxi
        get us a cab to drive to {place}""",
    ),
    intent(
        "check_weather",
        "rain, sun or wind at a place",
        "city:city:where; date:date:which day",
        """(check|tell me|show me) the (weather|forecast) (in|for) {city} on {date}
        =what is the (weather|forecast) (in|for) {city} on {date}?
        =(will|does) it (rain|snow|get cold|get warm) in {city} on {date}?
        =is it (sunny|warm|cold|windy) in {city}?
        =how (warm|cold|windy|sunny) (will it be|is it) in {city} on {date}?
        =do I need an umbrella in {city} on {date}?
        =on {date} I am in {city}, what is the (weather|forecast)?""",
        """=on {date} will it be (cold|sunny) in {city}?
        look up how the weather will be in {city} on {date}
        =should I take an umbrella to {city} on {date}?
        =what does the {city} forecast look like?""",
    ),
    intent(
        "find_restaurant",
        "a place to eat",
        "cuisine:cuisine:kind of food; city:city:where",
        """(find|show|get) (me|us|) a {cuisine} (restaurant|place to eat) in {city}
        =where (can|should) (I|we) (eat|get) {cuisine} food in {city}?
        =(I|we) want to eat {cuisine} (food|) (tonight|) in {city}
        =(is there|are there) a good {cuisine} (restaurant|place) in {city}?
        =I am (hungry|looking) for {cuisine} food in {city}
        look for {cuisine} restaurants
        =which {cuisine} restaurant is good in {city}?""",
        """=in {city} where is a good place to eat {cuisine} food?
        =we are hungry, show us {cuisine} restaurants in {city}
        look for a place in {city} with {cuisine} food
        =I want a restaurant with {cuisine} food""",
    ),
    intent(
        "find_route",
        "the way between two places",
        "start:city:from where; goal:street:to where",
        """(find|show|tell) me the (way|route|road) from {start} to {goal}
        =how do (I|we) (get|go|drive|walk) from {start} to {goal}?
        =what is the (best|fastest|shortest) (way|route|road) from {start} to {goal}?
        (plan|find) (a|the) (route|way) to {goal}
        =I am in {start}, how do I (get|drive|walk) to {goal}?
        =how far is it from {start} to {goal}?
        (guide|take) me from {start} to {goal}""",
        """=which road do I take to go from {start} to {goal}?
        =to {goal} what is the best way from {start}?
        =we are in {start}, show us the shortest route to {goal}
        look up how to drive to {goal}""",
    ),
)

HOME: tuple[Intent, ...] = (
    intent(
        "lights_on",
        "light in a room",
        "room:room:which room",
        """(turn|switch|put) on the (lights|light|lamp|lamps) in the {room}
        (turn|switch|put) the {room} (lights|light|lamp) on
        (light up|make it bright in) the {room}
        =it is (too|so|very) dark in the {room}
        =I (can not|can't) see (anything|) in the {room}, (give me|I need) (some|more) light
        =(I need|we need|give me) (light|lights) in the {room}
        =the {room} (should|must) be (bright|brighter)""",
        """=the {room} is too dark, turn on a lamp
        =in the {room} the lights should be on
        bring some light to the {room}
        make the {room} brighter""",
    ),
    intent(
        "lights_off",
        "darkness in a room",
        "room:room:which room",
        """(turn|switch|put) off the (lights|light|lamp|lamps) in the {room}
        (turn|switch|put) the {room} (lights|light|lamp) off
        (make it dark in|darken) the {room}
        =it is (too|so|very) bright in the {room}
        =(nobody is|no one is) in the {room}, (lights|light|lamps) off
        =(I need|we need|give me) (no|less) light in the {room}
        =the {room} (should|must) be (dark|darker)""",
        """=the {room} is too bright, turn off a lamp
        =in the {room} the lights should be off
        make the {room} darker
        =no one is in the {room}, switch the light off""",
    ),
    intent(
        "set_heating",
        "warmth in a room",
        "degrees:degrees:how warm; room:room:which room",
        """(set|turn|put) the (heating|heater|thermostat) in the {room} to {degrees}
        (heat|warm) the {room} (up|) to {degrees}
        make (it|) {degrees} in the {room}
        =I (want|need) {degrees} in the {room}
        =the {room} (should|must) be {degrees} warm
        (heat|warm) up the {room}
        =it is (too|so|very) cold in the {room}, (heat|warm) it to {degrees}""",
        """=in the {room} I want it to be {degrees}
        turn up the {room} heating to {degrees}
        =the thermostat in the {room} should be set to {degrees}
        =I am cold in the {room}, turn the heating up""",
    ),
    intent(
        "set_alarm",
        "to be woken up",
        "time:time:when to ring; date:date:which day",
        """(set|make|start) (an|my) alarm (for|at) {time} on {date}
        wake me (up|) at {time} on {date}
        =I (need|want|have) to (get up|wake up|be up) at {time} on {date}
        =on {date} the alarm (should|must) (ring|go off) at {time}
        (get|wake) me (up|out of bed) at {time}
        =I have to be out of bed at {time}
        (set|put) the alarm to {time} on {date}""",
        """=at {time} on {date} I have to wake up
        make the alarm ring at {time} on {date}
        =I want to be out of bed on {date} at {time}
        =on {date} wake me at {time}""",
    ),
    intent(
        "cancel_alarm",
        "an alarm removed",
        "time:time:which alarm; date:date:which day",
        """(cancel|delete|remove|clear) (the|my) {time} alarm on {date}
        (cancel|delete|remove|turn off|switch off) the alarm (for|at) {time} on {date}
        =I (do not|don't) need (the|my|an) alarm at {time} on {date}
        =(do not|don't) wake me (up|) at {time} on {date}
        =on {date} (no|I need no) alarm at {time}
        =forget (the|my) alarm (at|for) {time}
        =the alarm (for|at) {time} is not needed on {date}""",
        """=I do not want to wake up at {time} on {date}, delete the alarm
        =no alarm is needed at {time} on {date}
        remove my alarm on {date} at {time}
        turn my {time} alarm off""",
    ),
    intent(
        "set_timer",
        "a countdown",
        "duration:duration:how long",
        """(set|start|make) a (timer|countdown) (for|of) {duration}
        (set|start) a {duration} (timer|countdown)
        (count|time) {duration} (for me|)
        =(tell|remind) me (in|after) {duration}
        =I need a (timer|countdown) (for|of) {duration}
        =(my|the) (tea|pasta|bread|cake) (needs|takes) {duration}
        =let me know (in|after|when it has been) {duration}""",
        """=the timer should be {duration}
        =after {duration} let me know
        =my cake takes {duration}, start a timer
        let the countdown be {duration}""",
    ),
)
