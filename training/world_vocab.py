"""Words of the attribute world: names of every attribute value, and which icon draws which object.

An attribute value is an index into its name tuple; the order is fixed, because trained bases and label files
store indices. `OBJECTS` starts with the most recognizable and mutually distinct icons, so that a prefix of it
is a smaller world of its own. Icon names are those of the Material Design Icons font (Apache-2.0).
"""

from __future__ import annotations

from dear_serve.errors import ConfigError

ATTRIBUTES = ("color", "shape", "texture", "object", "location")

COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white", "gray")
SHAPES = ("circle", "square", "triangle", "diamond", "pentagon", "star", "heart", "cross", "arch", "drop")
TEXTURES = ("plain", "striped", "dotted", "checkered", "zigzag", "ringed")
LOCATIONS = (
    "top left",
    "top",
    "top right",
    "left",
    "center",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)

# name, or name=icon where the font calls it something else; ";" separates.
_OBJECT_TABLE = """
cat; dog; bird; fish; rabbit; elephant; horse; cow; pig; duck; owl; penguin; turtle; snake; snail;
butterfly; spider; shark; kangaroo; panda; paw; feather; cactus; flower; tulip=flower_tulip; tree;
pine tree=pine_tree; palm tree=palm_tree; leaf; maple leaf=leaf_maple; mushroom; apple=food_apple; pizza;
hamburger; carrot; cake; cookie; ice cream=ice_cream; cherries=fruit_cherries; pineapple=fruit_pineapple;
watermelon=fruit_watermelon; coffee; wine glass=glass_wine; kettle; car; bus; truck; train; bicycle;
airplane; helicopter; rocket; sailboat=sail_boat; tractor; hammer; wrench; axe; saw=hand_saw; shovel; key;
lock; scissors=content_cut; anchor; magnet; ladder; sword; bed; sofa; lamp; chair=table_chair; toilet;
clock; candle; bell; umbrella; light bulb=lightbulb; gift; glasses; hat=hat_fedora; shirt=tshirt_crew; tie;
crown; ring; sneaker=shoe_sneaker; telephone=phone; camera; microphone; headphones; guitar=guitar_acoustic;
trumpet; book=book_open_variant; pencil; envelope=email; globe=globe_model; microscope; robot; dice=dice_5;
puzzle piece=puzzle; trophy; flag; soccer ball=soccer; basketball; skateboard; lighthouse; castle;
house=home; volcano; cloud; sun=white_balance_sunny; moon=moon_waning_crescent; snowflake; snowman;
lightning=lightning_bolt; fire; skull; ghost; bone; eye; tooth; bomb; sheep; dolphin; bee; ladybug;
jellyfish; koala; bat; mouse=rodent; teddy bear=teddy_bear; cobweb=spider_web; turkey; sprout; grass;
cupcake; candy; candy cane=candycane; popsicle=ice_pop; bread=bread_slice; fried egg=egg_fried;
grapes=fruit_grapes; pear=fruit_pear; corn; croissant=food_croissant; hot dog=food_hot_dog; noodles;
popcorn; fries=french_fries; pretzel; peanut; pumpkin; cocktail=glass_cocktail; wine bottle=bottle_wine;
motorbike; ferry; submarine; ambulance; fire truck=fire_truck; bulldozer; excavator; scooter;
hot air balloon=airballoon; ufo; snowmobile; tank; screwdriver; pickaxe; pliers; brush;
paint roller=format_paint; knife; nail; flashlight; broom; bucket; vacuum cleaner=vacuum; rake;
spray bottle=spray_bottle; fire extinguisher=fire_extinguisher; toolbox; desk lamp=desk_lamp;
table=table_furniture; door; bathtub; shower=shower_head; fridge; stove; microwave; toaster;
washing machine=washing_machine; iron; fan; alarm clock=alarm; mirror; television; fireplace; mailbox;
trash can=trash_can; balloon; sunglasses; bow tie=bow_tie; high heel=shoe_heel; watch; wallet; purse;
backpack=bag_personal; suitcase=bag_suitcase; lipstick; toothbrush; hanger; baby bottle=baby_bottle;
stroller=baby_buggy; pot=pot_steam; spoon=silverware_spoon; fork=silverware_fork; blender; basket; barrel;
bookshelf; syringe=needle; sock=stocking; newspaper; paperclip; ruler; earth; telescope; binoculars;
speaker; radio; violin; piano; saxophone; music note=music_note; calculator; laptop; printer;
smartphone=cellphone; keyboard; computer mouse=mouse; gamepad=gamepad_variant; chess knight=chess_knight;
chess rook=chess_rook; chess king=chess_king; medal; target=bullseye_arrow; football; baseball;
tennis racket=tennis; volleyball; bowling ball=bowling; golf; boxing glove=boxing_glove; dumbbell; skis=ski;
ice skate=skate; roller skate=roller_skate; hockey sticks=hockey_sticks; kite; parachute; tent; campfire;
compass; factory; church; mosque; bridge; wind turbine=wind_turbine; barn; hospital=hospital_building;
eiffel tower=eiffel_tower; pyramid; fountain; ferris wheel=ferris_wheel; mountain=image_filter_hdr; island;
rainbow=looks; alien; brain; ear=ear_hearing; hand=hand_front_right; foot=foot_print; lungs; ninja; pirate;
wizard hat=wizard_hat; theater masks=drama_masks; mask=domino_mask; horseshoe;
treasure chest=treasure_chest; coffin; gravestone=grave_stone; pistol; wand=magic_staff; bow=bow_arrow;
shield; handcuffs; gavel; scales=scale_balance; stethoscope; thermometer; test tube=test_tube; flask; atom;
dna; virus; satellite=satellite_variant; satellite dish=satellite_uplink; traffic light=traffic_light;
traffic cone=traffic_cone; fuel pump=gas_station; fire hydrant=fire_hydrant; wheelchair; stairs; fence;
battery; plug=power_plug; clapperboard=movie_open; piggy bank=piggy_bank; gem=diamond_stone;
shopping cart=cart; store; hourglass=timer_sand; stopwatch=timer; calendar; map; gear=cog;
chain=link_variant; magnifying glass=magnify; map pin=map_marker; yin yang=yin_yang; mustache; hook;
fishbowl; palette; swimmer=swim; runner=run; chef hat=chef_hat; helmet=racing_helmet; whistle; anvil;
floppy disk=floppy; hair dryer=hair_dryer; lifebuoy; megaphone=bullhorn; money bag=sack;
ship wheel=ship_wheel; sickle; steering wheel=steering; typewriter; unicycle; watering can=watering_can;
wheelbarrow=wheel_barrow; bank; beehive=beehive_outline; fingerprint
"""

_PAIRS = tuple(
    (name.strip(), (icon or name).strip().replace(" ", "_"))
    for name, _, icon in (entry.partition("=") for entry in _OBJECT_TABLE.split(";"))
)
OBJECTS = tuple(name for name, _ in _PAIRS)
ICONS = tuple(icon for _, icon in _PAIRS)
CORE_OBJECTS = 120

VOCABULARY: dict[str, tuple[str, ...]] = {
    "color": COLORS,
    "shape": SHAPES,
    "texture": TEXTURES,
    "object": OBJECTS,
    "location": LOCATIONS,
}

# Plurals and stuff: "scissors on a red heart", not "a scissors".
_NO_ARTICLE_TABLE = """
cherries; scissors; glasses; headphones; lightning; fire; grass; candy; bread; grapes; corn; noodles; popcorn;
fries; pliers; sunglasses; binoculars; skis; lungs; handcuffs; scales; stairs; dna; golf; dice;
hockey sticks; theater masks
"""
NO_ARTICLE = frozenset(name.strip() for name in _NO_ARTICLE_TABLE.split(";"))
_CONSONANT_SOUND = ("uni", "ufo", "eu")


def object_names(n_objects: int | None = None) -> tuple[str, ...]:
    """Names of the first `n_objects` objects (all of them by default).

    Raises:
        ConfigError: `n_objects` isn't in 1..len(OBJECTS).
    """
    if n_objects is None:
        return OBJECTS
    if not 1 <= n_objects <= len(OBJECTS):
        raise ConfigError(f"n_objects is {n_objects}; choose 1 to {len(OBJECTS)}")
    return OBJECTS[:n_objects]


def with_article(noun: str, *looks: str) -> str:
    """The noun phrase of `looks` and `noun` with "a" or "an" in front, or none before plurals and stuff."""
    phrase = " ".join([*looks, noun])
    if noun in NO_ARTICLE:
        return phrase
    vowel = phrase[0] in "aeiou" and not phrase.startswith(_CONSONANT_SOUND)
    return f"{'an' if vowel else 'a'} {phrase}"
